"""What is wrong with a set-up, measured on the machine itself: one file per check."""
