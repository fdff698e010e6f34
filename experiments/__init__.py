"""The paper's experiments on real data: ``python -m experiments --help``, from the folder of the repository.

The protocol is docs/replication-protocol.md, the results docs/replication.md.
"""
