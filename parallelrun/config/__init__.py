"""Keys, recipes and composition by Hydra: from overrides to a `Config`. No module imports torch; most avoid Hydra."""
