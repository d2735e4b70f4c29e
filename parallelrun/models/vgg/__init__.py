"""VGG-16 (Simonyan and Zisserman 2015, configuration D)."""
