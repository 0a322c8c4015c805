"""Gristmill: bulk LLM inference as a Snakemake workflow.

The modules read in the order in which data flows: `campaign` → `sources` → `requests` → `cutting` →
`manifest` → `shards` → `journal` → `endpoint` and `client` → `group` → `outcomes` → `merge`.
"""

__version__ = "0.1.0"
