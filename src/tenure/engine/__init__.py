"""The engine: storage-agnostic. It is given a store and a wake-up; it never names one."""
