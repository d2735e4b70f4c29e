"""The proof that a plan trains as one device."""
