"""The tensor axis: weights cut over ranks, found by running the step, on code that knows nothing of it."""
