"""Models, goldens, drafters and rigs for the checks of whole models and of engines: L2 and L3."""
