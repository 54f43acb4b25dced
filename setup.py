"""Metadata lives in pyproject.toml; this file lets tools that still call setup.py find it."""

from setuptools import setup

setup()
