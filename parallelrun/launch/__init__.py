"""Starting, watching and restarting ranks. When imported, only `ranks.worker` and `store.token_store` load torch."""
