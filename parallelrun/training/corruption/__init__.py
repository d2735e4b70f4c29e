"""Finds silent data corruption while a run trains: bits that memory or a device has changed without an error."""
