"""What binds a kernel to an operation of the contract: refusals, launch, and the builds that prove it compiles."""
