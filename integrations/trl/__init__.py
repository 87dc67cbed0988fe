"""The suite's losses, routes and columns inside TRL's trainer: ``trainer.SteadyGRPOTrainer``."""
