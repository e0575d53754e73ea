"""How near the engine model's times are to a real engine's: calibrate, then predict what was held out."""
