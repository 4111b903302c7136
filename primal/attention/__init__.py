"""Attention layers, one per file, all with the signature of ``base.Attention``."""
