"""One file per check. Each has a module-level CHECK, and is found by being here: nothing else lists them."""
