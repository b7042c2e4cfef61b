"""The resources ElasticJob and ScalePlan: types, rules and validation. Pure."""
