# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the comparisons' tests."""

import pytest


@pytest.fixture
def unrendered(monkeypatch):
    """Pictures are drawn and not rendered, which takes most of a report's time: for tests of what a page says."""
    monkeypatch.setattr("megatron_dyn.web_page.as_png", lambda figure: b"png")
