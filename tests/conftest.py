"""Stands here so that pytest puts this directory on the import path: tests of several floors share its helper modules."""
