(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const boxes = all(".box"), edges = all(".edge"), marked = all("[data-name], .edge");

  // One tooltip for everything; the browser's own would come beside it.
  all("[data-tip] > title").forEach(title => title.remove());
  all("[data-tip][title]").forEach(element => element.removeAttribute("title"));
  const tip = document.body.appendChild(Object.assign(document.createElement("div"), { id: "tip", hidden: true }));
  const show = (element, x, y) => {
    tip.textContent = element.dataset.tip;
    tip.hidden = false;
    tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = (y + 18 + tip.offsetHeight > innerHeight ? Math.max(8, y - tip.offsetHeight - 12) : y + 18) + "px";
  };

  // What belongs to a box, an edge, a bar or a row of the table stays; the rest fades.
  const light = element => {
    const edge = element.classList.contains("edge") ? element : null;
    const name = element.dataset.name;
    const mine = boxes.filter(box => edge ? [edge.dataset.source, edge.dataset.target].includes(box.dataset.box) : box.dataset.name === name);
    const ids = new Set(mine.map(box => box.dataset.box));
    const lit = new Set(edge ? [edge] : edges.filter(other => ids.has(other.dataset.source) || ids.has(other.dataset.target)));
    const ends = new Set([...lit].flatMap(one => [one.dataset.source, one.dataset.target]));
    const names = new Set(mine.map(box => box.dataset.name));
    marked.forEach(one => {
      const on = one.classList.contains("edge") ? lit.has(one) : names.has(one.dataset.name);
      one.classList.toggle("lit", on);
      one.classList.toggle("dim", !on && one.tagName !== "TR" && !(one.dataset.box && ends.has(one.dataset.box)));
    });
  };
  const clear = () => { tip.hidden = true; marked.forEach(one => one.classList.remove("lit", "dim")); };
  const target = event => event.target.closest?.("[data-name], .edge");
  document.addEventListener("pointerover", event => { const one = target(event); if (one) light(one); else clear(); });
  document.addEventListener("pointermove", event => {
    const one = event.target.closest?.("[data-tip]");
    if (one) show(one, event.clientX, event.clientY); else tip.hidden = true;
  });
  document.addEventListener("focusin", event => {
    const one = target(event);
    if (!one?.dataset.tip) return;
    const place = one.getBoundingClientRect();
    light(one);
    show(one, place.left, place.bottom - 8);
  });
  document.addEventListener("focusout", clear);
  document.addEventListener("keydown", event => { if (event.key === "Escape") clear(); });

  // A click on a column sorts by it, a second click the other way round.
  all("thead th").forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const falling = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : column > 1;
    all("thead th").forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const value = row => row.cells[column].dataset.sort ?? row.cells[column].textContent;
    const compare = (a, b) => column > 1 ? value(a) - value(b) : value(a).localeCompare(value(b));
    const body = document.querySelector("tbody");
    [...body.rows].sort((a, b) => falling ? compare(b, a) : compare(a, b)).forEach(row => body.append(row));
  }));
})();
