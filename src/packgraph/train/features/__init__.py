"""What a run has to know of each feature; the features themselves have rooms of their own."""
