"""From the command to the trainer: composed config, Ray, session, sweeps."""
