"""Mixture of experts: records of experts, the store that holds or reads them, their block; Python loads them."""
