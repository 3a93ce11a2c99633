"""Other processes of the job: started again, or spawned."""
