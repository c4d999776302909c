"""Model code behind one small protocol (base.py), and checkpoints to run it on."""
