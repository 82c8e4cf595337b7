# SPDX-License-Identifier: Apache-2.0
"""Everything about the package is said in pyproject.toml; this file serves tools that still call setup.py."""

from setuptools import setup

setup()
