//! Names of a model's parameters.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor, backend::Backend};

/// One float parameter of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamInfo {
    /// Module path, enum variants skipped: the in-memory checkpoint name without the family's prefix, e.g.
    /// `layers.3.mixer.gate.weight`.
    pub path: String,
    /// Identity: two places with the same id are one (tied) parameter.
    pub id: ParamId,
    pub shape: Vec<usize>,
    pub dtype: DType,
    /// False for buffers and frozen parameters.
    pub trainable: bool,
    /// Other paths of the same parameter (tied weights).
    pub aliases: Vec<String>,
}

impl ParamInfo {
    /// True for stacked routed-expert weights, of which each rank of an expert-parallel group holds its own share along the
    /// first axis. Everything else is replicated. Shared experts have another path (`shared_experts`).
    pub fn is_expert(&self) -> bool {
        self.path.split('.').any(|name| name == "experts")
    }
}

/// Every float parameter of a model once, in module order. The order is the same on every rank and in every run, unlike
/// that of the ids, which are random.
#[derive(Debug, Clone, Default)]
pub struct ParamTable {
    entries: Vec<ParamInfo>,
    index: HashMap<ParamId, usize>,
}

impl ParamTable {
    /// Parameters of `module`. A tied parameter is listed under the first path that reaches it.
    pub fn new<B: Backend, M: Module<B>>(module: &M) -> Self {
        let mut collector = Collector::default();
        module.visit(&mut collector);
        collector.table
    }

    /// All entries, in module order.
    pub fn entries(&self) -> &[ParamInfo] {
        &self.entries
    }

    /// The entry of an id.
    pub fn get(&self, id: ParamId) -> Option<&ParamInfo> {
        self.index.get(&id).map(|&i| &self.entries[i])
    }

    /// Entries that require gradients.
    pub fn trainable(&self) -> impl Iterator<Item = &ParamInfo> {
        self.entries.iter().filter(|p| p.trainable)
    }
}

/// Module path while a visitor or mapper walks a model.
#[derive(Debug, Clone, Default)]
pub struct PathStack(Vec<String>);

impl PathStack {
    /// Call from `enter_module`.
    pub fn enter(&mut self, name: &str, container: &str) {
        // Which variant an enum field holds (attention or Mamba) is no part of a checkpoint name.
        if !container.starts_with("Enum:") {
            self.0.push(name.to_string());
        }
    }

    /// Call from `exit_module`.
    pub fn exit(&mut self, container: &str) {
        if !container.starts_with("Enum:") {
            self.0.pop();
        }
    }

    /// The dotted path.
    pub fn path(&self) -> String {
        self.0.join(".")
    }
}

#[derive(Default)]
struct Collector {
    path: PathStack,
    table: ParamTable,
}

impl<B: Backend> ModuleVisitor<B> for Collector {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.enter(name, container_type);
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        self.path.exit(container_type);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(&i) = self.table.index.get(&param.id) {
            self.table.entries[i].aliases.push(self.path.path());
            return;
        }
        let value = param.val();
        self.table.index.insert(param.id, self.table.entries.len());
        self.table.entries.push(ParamInfo {
            path: self.path.path(),
            id: param.id,
            shape: value.dims().to_vec(),
            dtype: value.dtype(),
            trainable: value.is_require_grad(),
            aliases: Vec::new(),
        });
    }
}
