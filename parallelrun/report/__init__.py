"""Tables, figures and pages drawn from the files of runs; records; experiment trackers. No module imports torch."""
