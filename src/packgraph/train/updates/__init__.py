"""Ways to update parameters, behind one seam (`rule.py`)."""
