"""The conformance kit: whether a plugin trains like a reference written by hand, wherever it is admitted."""

from __future__ import annotations
