"""One file per check, which is named as its file and found by being here: nothing else lists them."""
