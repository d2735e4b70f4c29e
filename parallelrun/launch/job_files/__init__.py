"""Job files for schedulers of clusters: text that people can read and edit."""
