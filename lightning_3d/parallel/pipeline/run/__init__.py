"""Running the user's step on one stage, and outside of schedules on all of them together."""
