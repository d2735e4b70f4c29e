"""Errors, wording, records, registry, layouts and small contracts that every room uses. No module imports torch."""
