"""The engine seen from the front door: real stores, real workers, no mocks."""
