"""Fused operations, one per file, each defined in ``functional.py``, their only importer."""
