"""Uses of trained weights on one process: generated text (`generate`) and scores on a dataset (`evaluate`)."""
