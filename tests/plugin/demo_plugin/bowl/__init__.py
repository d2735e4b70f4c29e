"""Bowl: one residual MLP over features and a head, the smallest model with something to split over tp."""
