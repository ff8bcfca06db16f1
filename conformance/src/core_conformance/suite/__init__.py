"""The checks, one file for each topic, named test_<level>_<topic>.py. They belong to the wheel and are hashed."""
