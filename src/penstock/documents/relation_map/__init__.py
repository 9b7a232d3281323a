"""Maps of relations: what rows hung on before they changed."""

from penstock.documents.relation_map.contract import RelationMap, TrackedRelation, link_names, link_update_schema
from penstock.documents.relation_map.opening import open_relation_map
from penstock.documents.relation_map.postgres import PostgresRelationMap
from penstock.documents.relation_map.sqlite import SqliteRelationMap

__all__ = [
    "PostgresRelationMap",
    "RelationMap",
    "SqliteRelationMap",
    "TrackedRelation",
    "link_names",
    "link_update_schema",
    "open_relation_map",
]
