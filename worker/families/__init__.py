"""Model families: one module for each, one row in a table (docs/models.md, "Adding a family").

base.py            what all families share, and the places in which they differ
table.py           the families that are served
deepseek_v32.py    DeepSeek-V3.2
glm_moe_dsa.py     GLM-5 and its successors
axk2.py            A.X-K2 and A.X-K2-Light

Importing them imports the standard library alone: commands list families, and `hisparse size` counts their bytes.
"""
