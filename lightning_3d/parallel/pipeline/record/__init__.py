"""What a step does at the level of its containers: who is called when, and which values go on."""
