"""How good a picture is: nearness to another one, whether it shows what its prompt says, and nearness of two sets."""
