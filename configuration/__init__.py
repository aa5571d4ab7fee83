"""What a model is: one configuration_<family>.py a family."""
