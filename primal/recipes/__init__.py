"""Recipes: everything a number depends on as a value, and the tables made of such numbers."""
