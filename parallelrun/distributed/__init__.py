"""The mesh, the labelled and counted collectives, the shared-memory backend, the adapter of private torch symbols."""
