// Makes Room a class of TorchScript, which the schemas of the cache's ops name.
#pragma once
#include <torch/custom_class.h>

#include <tuple>
#include <utility>

#include "room.h"

namespace moe_metal {

// Every file that registers kernels with a Room calls it first, since nothing orders the initialisation of files and
// libraries.
inline void register_room() {
  using Self = c10::intrusive_ptr<Room>;
  if (torch::getCustomClass("__torch__.torch.classes.moe_metal.Room")) return;
  const auto rows = [](Room::Parts parts) { return std::tuple(std::move(parts.first), std::move(parts.second)); };
  torch::class_<Room>("moe_metal", "Room")
      .def(torch::init<Tensor, Tensor, bool, int64_t>())
      .def("append", [rows](const Self& room, const Tensor& keys,
                            const Tensor& values) { return rows(room->append(keys, values)); })
      .def("shown", [rows](const Self& room) { return rows(room->shown()); })
      .def("show", &Room::show)
      .def("reorder", &Room::reorder)
      .def("keep_past", &Room::keep_past)
      .def("memory", &Room::memory)
      .def("rows", &Room::stored)
      .def("total", &Room::total)
      .def("set_total", &Room::set_total);
}

}  // namespace moe_metal
