"""Stands here so that pytest puts this directory on the import path: tests of several floors share its helper modules."""

from hypothesis import settings

# How long an example takes depends on what else the machine does.
settings.register_profile("almanac", deadline=None)
settings.load_profile("almanac")
