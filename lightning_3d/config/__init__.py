"""The words of a run: typed options, batch arithmetic, and where the packaged configuration lies. No torch."""
