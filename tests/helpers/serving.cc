// Serves a SavedModel as C++ programs do: TensorFlow's loader with its defaults, requests from several threads at once.
//
// Usage: serving FOLDER CPU_DEVICES THREADS. Thread t asks for t + 1 rows of numbers (t + 1) / 10, and its line says the
// first entry of each row of the answer.

#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tensorflow/cc/saved_model/loader.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/public/session_options.h"

int main(int argc, char** argv) {
  tensorflow::SessionOptions options;
  (*options.config.mutable_device_count())["CPU"] = std::atoi(argv[2]);
  tensorflow::SavedModelBundle bundle;
  auto loaded = tensorflow::LoadSavedModel(options, tensorflow::RunOptions(), argv[1], {"serve"}, &bundle);
  if (!loaded.ok()) {
    std::cout << loaded.ToString() << std::endl;
    return 1;
  }
  const auto& signature = bundle.meta_graph_def.signature_def().at("serving_default");
  const std::string given = signature.inputs().begin()->second.name();
  const std::string asked = signature.outputs().begin()->second.name();
  const int width = signature.inputs().begin()->second.tensor_shape().dim(1).size();
  const int count = std::atoi(argv[3]);
  std::vector<std::string> answers(count);
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t) {
    threads.emplace_back([&, t] {
      tensorflow::Tensor x(tensorflow::DT_FLOAT, {t + 1, width});
      x.flat<float>().setConstant((t + 1) / 10.0f);
      std::vector<tensorflow::Tensor> y;
      auto ran = bundle.session->Run({{given, x}}, {asked}, {}, &y);
      std::ostringstream line;
      if (ran.ok()) {
        auto rows = y[0].matrix<float>();
        for (int i = 0; i < rows.dimension(0); ++i) line << rows(i, 0) << " ";
      } else {
        line << ran.ToString();
      }
      answers[t] = line.str();
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& answer : answers) std::cout << answer << std::endl;
}
