"""The command line: verbs, tools, sweeps and errors on screen. Only ranks and trained models make it import torch."""
