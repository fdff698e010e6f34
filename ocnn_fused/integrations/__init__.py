"""The regulariser in training frameworks; each module needs its framework, so none is imported here."""
