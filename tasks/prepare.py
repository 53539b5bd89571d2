"""A recipe's data set by itself, as `dvc repro` makes it: python -m tasks.prepare recipe=NAME [key=value ...]"""

import sys

from tasks.compose import compose
from tasks.stages import first_weights, prepared


def main() -> None:
    """Makes `data/RECIPE`; bad input ends with its error on stderr and exit code 1."""
    try:
        config = compose(sys.argv[1:])
        ready = prepared(config, first_weights(config))
    except ValueError as error:
        sys.exit(str(error))
    print(f"{ready.directory}: {', '.join(f'{split} {rows} rows' for split, rows in ready.rows.items())}")


if __name__ == "__main__":
    main()
