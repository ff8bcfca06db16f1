"""Steps, inputs and answers for the checks of single operations: L1, and the forms that L0 asks about."""
