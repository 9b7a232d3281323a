"""Sends every change to Kafka, in transactions that also hold the positions."""

from penstock.destinations.kafka.destination import KafkaDestination

__all__ = ["KafkaDestination"]
