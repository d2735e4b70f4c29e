"""From a configuration to a frozen plan, its predictions, and searches over plans. No module imports torch."""
